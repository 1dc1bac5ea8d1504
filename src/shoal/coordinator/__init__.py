"""The pool's server: members, assignments, submissions, batches and trust, behind signed HTTP routes.

members, nodes             registration, heartbeats, the states of a member
assignment, arrivals       which task a worker gets next; lateness and task sizes
submissions                the table of all tasks, and the states of one
judgement, checkers, trust claims and verdicts; second opinions; statistics over all of a worker's work
credit                     what is earned, staked and settled on a chain
batches, groups            what the learner trains on
journal                    the run's work as JSON lines
pool, database             the parts above, over one database
operating                  the operator's own actions
state, http/               the coordinator's folder; its routes
"""
