"""What all pages share: security headers, static files, request guards, allowances; `shared/` holds the theme.

Used by `serve` and `dashboard`. Knows no process.
"""
