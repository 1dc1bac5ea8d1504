"""Checks submissions. Only a validator can accept one.

service    the process: claims submissions, uploads verdicts       judge      opens and examines files
checks     one function for each lie                               case       a submission under examination
prefill    one forward of the claimed version                      verdict    the message for the coordinator
spending   how much of the tolerance was used                      by_hand    `shoal audit FILE`
"""
