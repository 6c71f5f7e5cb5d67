"""`sglang-patches port`: the series of one upstream release carried to another.

A *lane* is a pinned upstream release with its folder `patches/<release>/`. `wheels` gets releases from the package
index, `scopes` tells classes, functions and names of a file, `place` finds where one hunk belongs in the other release,
`upstreamed` whether upstream has by now what the patch adds, `needs` what the patch's own code imports and upstream
lacks; `carry` makes a whole patch of it, `lane` writes the result, and `matrix` and `report` show it.
"""
