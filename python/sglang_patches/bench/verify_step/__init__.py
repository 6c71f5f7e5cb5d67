"""`sglang-patches bench verify-step`: how long each part of an EAGLE-3 cycle takes, beside what its bytes alone need.

One engine is started per number of draft tokens (and one without speculation); inside it batch sizes, contexts and
graphs or eager take turns. `grid` says what is measured, `engine` measures it in a process of its own with `probe`,
`reading` and `kernels` in the scheduler, `journal` keeps every sample as it comes, `rows` and `floor` make the table.
"""
