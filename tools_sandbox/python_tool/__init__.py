"""The python tool: model code in a fresh, isolated process that costs milliseconds.

    service (asyncio)  --- one control socket --->  zygote       preloads modules, forks, decides nothing
                                                      | fork, one a call
                       <--- one socket a call --->  supervisor   time limit, output, the end of the whole process tree
                                                      | fork
                                                    init         first process of the call's own process tree
                                                      | fork
                                                    worker       limits on, privileges off, then the foreign code

`pool` is the service's side, `zygote`, `supervisor` and `worker` are the kinds of process. `isolation` raises walls,
each in a module of its own (`files`, `seccomp`, `landlock`, `cgroups`, `watchdog`); `walls` says which stand, and what
level that is. `sessions` keeps states for the service, `state` makes and reads them inside the walls. What runs in the
zygote and below imports the standard library alone, and cloudpickle.
"""
