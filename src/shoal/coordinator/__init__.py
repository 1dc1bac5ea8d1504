"""The pool's server: members, assignments, submissions, batches and trust, behind signed HTTP routes.

members, nodes              registration, heartbeats, the states of a member
assignment, arrivals        which task a worker gets next; lateness and task sizes
submissions                 the table of tasks and their submissions, with their states
judgement, checkers, trust  claims and verdicts; second opinions; statistics over all of a worker's work
credit                      what is earned, staked and settled on a chain
batches, groups             what the learner trains on
pool, database              the parts above, joined over one database
folder                      the coordinator's folder; the operator's actions
http/                       the routes, the process that serves them, reports
"""
