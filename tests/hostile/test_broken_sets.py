"""Sets that are generated, tables of texts and sets of libraries: wrong settings, damaged caches, odd rows."""
