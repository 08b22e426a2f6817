"""The lab without the rest of the package."""

from __future__ import annotations

from pathlib import Path

import laconic
import laconic_lab

# In front of a script: the lab without laconic/__init__, which imports torch and takes seconds.
ALONE = f"""
import sys, types
package = types.ModuleType("laconic")
package.__path__ = [{str(Path(laconic.__file__).parent)!r}]
sys.modules["laconic"] = package
sys.path.append({str(Path(laconic_lab.__file__).parents[1])!r})
"""
