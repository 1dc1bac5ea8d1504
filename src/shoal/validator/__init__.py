"""Checks submissions. Only a validator can accept one.

service    the process: claims submissions, uploads verdicts       judge      opens and examines files
checks     one function per lie                                    case       a submission under examination
exact      zero tolerance, where both sides compute alike              results    what a verdict tells of accepted groups
prefill    one forward of the claimed version                      by_hand    `shoal verify`
distribution   the test of token probabilities
"""
