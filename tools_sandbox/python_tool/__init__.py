"""The python tool: it runs the model's code in a fresh, isolated process that costs milliseconds.

    service (asyncio)  --- one control socket --->  zygote       preloads modules, forks, decides nothing
                                                      | fork, one per call
                       <--- one socket per call --> supervisor   time limit, output, the end of the whole process tree
                                                      | fork
                                                    init         first process of the call's own process tree
                                                      | fork
                                                    worker       limits on, privileges off, then the foreign code

`tool` and `pool` are the service's side; `zygote`, `call_supervisor` and `worker` are the three kinds of process.
`isolation` raises the walls, each in its own module (`files`, `seccomp`, `landlock`, `cgroups`, `watchdog`). `walls`
describes which of them stand and which level that is. `sessions` stores states for the service; `state` saves and
loads them inside the walls.

May import `tool`, `config`, `answers` and `utils`. Code that runs in the zygote and below imports only the standard
library, cloudpickle, and modules of this package and `utils` that do the same.
"""
