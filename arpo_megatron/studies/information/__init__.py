"""Information of a tree about the gradient, per tool call, at a fixed policy: ways of branching compared.

For a reference direction u and the gradient g of one tree, an arm's information per call is

    E[g.u]^2 / (Var(g.u) * E[calls])

the squared ratio of signal to noise that one executed tool call buys. `sampling` grows the trees, `directional` finds u
and the derivative of every segment's log-prob along it, `samples` computes g.u, `report` has figures and tables.

May import what `studies` may.
"""
