"""The stages by name, in the order of a build. A new stage is a file here and a line below."""

from pipeline.core.stage import Stage
from pipeline.stages.convert import STAGE as CONVERT
from pipeline.stages.engine import STAGE as ENGINE
from pipeline.stages.package import STAGE as PACKAGE
from pipeline.stages.plan import STAGE as PLAN
from pipeline.stages.verify import STAGE as VERIFY

__all__ = ["STAGES"]

STAGES: dict[str, Stage] = {stage.name: stage for stage in (PLAN, CONVERT, VERIFY, ENGINE, PACKAGE)}
