"""Steps on fake ``cuda`` tensors in a build without CUDA: what the emulation of CUDA on fakes of the CPU is held to."""
