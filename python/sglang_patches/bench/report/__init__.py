"""One HTML page of all results: found, read, drawn, rendered.

`page` finds results and renders the page, `sections` makes what it shows of one, `older` reads the formats from before
result folders, `charts` draws.
"""
