"""What all pages share: security headers, static files, request guards, allowances; `static/` holds the theme.

Used by `serve`; made for every other page of Shoal too. Knows no process.
"""
