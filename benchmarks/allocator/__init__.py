"""A small device made of CPU memory: a torch allocator that counts every byte and enforces a limit."""
