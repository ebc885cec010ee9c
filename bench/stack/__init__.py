"""The parts of ``bench.tensor_parallel``: a bare stack of layers, its timing and its report."""
