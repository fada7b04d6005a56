"""The measuring harness: contenders in their own processes, interleaved rounds, medians, results with their limit."""
