"""From dense models to low-rank ones: calibration, statistics, ranks and factors."""
