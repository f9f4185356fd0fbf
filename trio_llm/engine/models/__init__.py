"""The Model protocol; finding, converting and loading models."""
