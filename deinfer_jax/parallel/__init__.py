"""How a model is split over devices: strategies and their collectives."""
