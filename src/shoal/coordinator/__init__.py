"""The pool's server: members, assignments, submissions, batches and trust, behind signed HTTP routes.

members, nodes             who is here: registration, heartbeats, the table of states
assignment, arrivals       which task a worker gets next; what follows from how it did
submissions                the table of all tasks, and their life as one table of states
judgement, checkers, trust claims and verdicts; second opinions; what all of a worker's work says
credit                     what is earned, staked and settled
batches, groups            what the learner trains on
journal                    the run's work as lines for people
pool, database             all parts over one database; operating: the operator's own actions
state, http/               where it is kept; the routes
"""
