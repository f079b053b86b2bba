// Calls of kernels that were written down, made again for other tokens: see kernels/cpu/tape.py.
#pragma once
#include "tokens.h"

struct Call {
    Answer (*kernel)(char* memory, const int64_t* places);
    const int64_t* places;  // where its arguments lie in the memory
};

// A pointer among the arguments that is another at each call: to this one of what moves, so many bytes behind its start
struct Moving {
    int64_t place, which, offset;
};

struct Tape {
    const char* arguments;
    int64_t bytes;
    const Call* calls;
    int64_t call_count;
    const Moving* moving;
    int64_t moving_count;
};

// All calls, until one of them refuses; several threads may do so at once, each with arguments of its own
template <class E>
Answer replay_of(const Tape* tape, char* const* moved) {
    Buffer<char> memory(tape->arguments, tape->arguments + tape->bytes);
    for (const Moving* one = tape->moving; one != tape->moving + tape->moving_count; one++) {
        const char* to = moved[one->which] + one->offset;
        std::memcpy(&memory[one->place], &to, sizeof to);
    }
    for (const Call* call = tape->calls; call != tape->calls + tape->call_count; call++)
        if (const Answer answer = call->kernel(memory.data(), call->places)) return answer;
    return DONE;
}

KERNEL(replay, (const Tape* tape, char* const* moved), (tape, moved))
