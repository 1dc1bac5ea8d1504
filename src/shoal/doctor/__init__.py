"""Whether this machine will do, before anything is started: `facts` and `network` measure it, `examine` judges.

Invariant: nothing is changed, joined or left behind; each problem comes with its remedy.
Called by `shoal doctor`.
"""

from shoal.doctor.examine import examine
from shoal.doctor.facts import Facts, Role, gather
from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.network import Reach, Targets, look

__all__ = ["Facts", "Finding", "Reach", "Role", "Targets", "Verdict", "examine", "gather", "look"]
