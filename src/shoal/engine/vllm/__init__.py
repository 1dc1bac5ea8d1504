"""The vLLM engine (docs/operate.md): `client` in Shoal's process, `server` and `extension` in one of vLLM's environment."""
