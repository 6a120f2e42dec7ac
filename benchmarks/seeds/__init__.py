"""`python -m benchmarks.seeds`: the published results of RLBoost, StreamRL and RLHFless beside our simulator's."""
