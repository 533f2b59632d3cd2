"""The python tool: model code in a fresh, isolated process that costs milliseconds.

    service (asyncio)  --- one control socket --->  zygote       preloads modules, forks, decides nothing
                                                      | fork, one a call
                       <--- one socket a call --->  supervisor   time limit, output, the end of the whole process tree
                                                      | fork
                                                    init         first process of the call's own process tree
                                                      | fork
                                                    worker       limits on, privileges off, then the foreign code

`pool` is the service's side, `zygote`, `supervisor` and `worker` are the three kinds of process, `isolation` is the
only module that knows how processes are separated on this machine. The four of them import the standard library alone.
"""
