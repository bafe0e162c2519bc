"""What every test rank needs, imported and warmed up once, before the ranks are forked."""

import gc

import torchtitan.train  # noqa: F401

import torchtitan_mixle.spec
from tests.jobs import base_config

torchtitan_mixle.spec.register()
base_config()
gc.freeze()  # so that a rank's garbage collections do not go through all of it
