"""Check a machine and a config before a run: problems and their fixes, time, memory, disk.

    machine     what this machine is and does, measured and judged
    problems    what of a config does not fit: the model's positions, the tasks and their rewards
    work        a model's sizes, and what one step computes with it
    cost        seconds and bytes of each role for one step, from the measured speed of the cores
    estimate    time and memory of a whole run, and how its roles share the cores
    disk        what a run writes and keeps

Invariant: nothing is started, changed or left behind, and each problem comes with its remedy.
"""
