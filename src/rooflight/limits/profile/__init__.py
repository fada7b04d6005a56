"""What a profiler trace says: events, times, families of kernels, walls."""
