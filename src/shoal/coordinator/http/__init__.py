"""The coordinator's signed HTTP interface: routes, admission of requests, limits of strangers."""
