// Memory of a kernel's vectors. What a thread gives back it takes again: from the system it would be new pages at each
// call, fetched and zeroed one by one.
#pragma once
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

class KeptMemory {
    static constexpr int largest = 22;  // a power of two of bytes; what is larger goes back to the system
    static constexpr size_t line = 64, limit = size_t(1) << 25;
    struct Block {
        Block* next;
    };
    Block* blocks[largest + 1] = {};
    size_t kept = 0;

    static int power_of(size_t bytes) {
        int power = 6;
        while (size_t(1) << power < bytes) power++;
        return power;
    }
    static bool keeps(int power) {
#if defined(__SANITIZE_ADDRESS__)
        return false;  // which sees what is read after it was given back
#else
        return power <= largest;
#endif
    }

public:
    KeptMemory() = default;
    KeptMemory(const KeptMemory&) = delete;
    ~KeptMemory() {
        for (Block* block : blocks)
            while (block) std::free(std::exchange(block, block->next));
    }

    void* take(size_t bytes) {
        const int power = power_of(bytes);
        if (keeps(power) && blocks[power]) {
            kept -= size_t(1) << power;
            return std::exchange(blocks[power], blocks[power]->next);
        }
        const size_t whole = keeps(power) ? size_t(1) << power : (bytes + line - 1) / line * line;
        void* found = std::aligned_alloc(line, whole);
        return found ? found : throw std::bad_alloc();
    }

    void give(void* memory, size_t bytes) {
        const int power = power_of(bytes);
        if (!keeps(power) || kept + (size_t(1) << power) > limit) return std::free(memory);
        kept += size_t(1) << power;
        blocks[power] = new (memory) Block{blocks[power]};
    }
};

inline KeptMemory& kept_memory() {
    thread_local KeptMemory own;
    return own;
}

template <class Element>
struct FromKeptMemory {
    typedef Element value_type;
    FromKeptMemory() = default;
    template <class Other>
    FromKeptMemory(const FromKeptMemory<Other>&) {}
    Element* allocate(size_t count) { return static_cast<Element*>(kept_memory().take(count * sizeof(Element))); }
    void deallocate(Element* memory, size_t count) { kept_memory().give(memory, count * sizeof(Element)); }
    bool operator==(const FromKeptMemory&) const { return true; }
    bool operator!=(const FromKeptMemory&) const { return false; }
};

template <class Element>
using Buffer = std::vector<Element, FromKeptMemory<Element>>;

// The same of numbers that somebody writes before they are read: it holds anything
template <class Element>
struct Unwritten {
    const size_t bytes;
    Element* const data;
    explicit Unwritten(size_t count)
        : bytes(count * sizeof(Element)), data(count ? static_cast<Element*>(kept_memory().take(bytes)) : nullptr) {}
    Unwritten(const Unwritten&) = delete;
    ~Unwritten() {
        if (data) kept_memory().give(data, bytes);
    }
};
