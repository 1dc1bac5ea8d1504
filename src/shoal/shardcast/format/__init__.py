"""What a published version consists of on the wire: manifest, safetensors layout, deltas."""
