"""A task's way through the pool: drawn, sized, assigned, uploaded, judged, put in a batch, trained on."""
