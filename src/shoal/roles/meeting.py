"""The meeting of a learner's sites: opened with the run's model, it writes each agreed state as a policy version.

Invariant: version v is what all sites hold before step v. Called by `shoal meet`. It computes nothing but the outer step.
"""

from pathlib import Path

from shoal.config import Config
from shoal.diloco.meeting import Meeting

VERSIONS = "versions"  # in the meeting's folder; the origin watches it


def learner_meeting(config: Config, folder: Path, run: str) -> Meeting:
    """Raises MeetingError if the folder holds another run's meeting."""
    import torch

    from shoal.diloco.agreed import Agreed
    from shoal.learner.policy import Policy
    from shoal.learner.site_policy import about_of
    from shoal.learner.sites import Publisher, learner_terms, settings_of
    from shoal.model.sources import resolve

    section = config.learner
    no_reference = section.loss.model_copy(update={"beta": 0.0})
    section = section.model_copy(update={"loss": no_reference, "compile": False})
    torch.manual_seed(config.run.seed)  # adapters begin with random numbers: those of a learner at one site
    policy = Policy(resolve(config.model.name), section, "float32", "cpu", config.sampling.temperature)
    settings = settings_of(config)
    terms = learner_terms(config, policy)
    publisher = Publisher(policy, terms.fragments, folder / VERSIONS, section.keep_versions)
    first = Agreed.of(policy.masters, terms.fragments)
    return Meeting(folder, terms, about_of(settings, policy), run, lambda: first, publish=publisher)
