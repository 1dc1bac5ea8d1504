"""The published format, which every other room shares: manifest, names, safetensors layout, deltas."""
