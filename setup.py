from setuptools import setup
from setuptools.command.sdist import sdist

RULES = [
    "graft tests",
    "graft examples",
    "include .github/*.md .ruff.toml",
    "global-exclude *.pyc",
    "prune examples/guides/generated",
]


class SourceDistribution(sdist):
    """Has the tests, which run in it."""

    def make_distribution(self):
        for rule in RULES:
            self.filelist.process_template_line(rule)
        super().make_distribution()


setup(cmdclass={"sdist": SourceDistribution})
