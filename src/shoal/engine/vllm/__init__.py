"""The vLLM engine (docs/operate.md): `client` runs in Shoal's process, `server` and `extension` in vLLM's."""
