"""The one step of the build that pyproject.toml cannot describe: add train.py and serve.py.

They are at the top level of the repository, where a reader finds them. A wheel has them in
nanogrpo/scripts/, because top-level modules named `train` and `serve` could clash with others.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithScripts(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            scripts = Path(self.build_lib, "nanogrpo", "scripts")
            self.mkpath(str(scripts))
            for name in ("train.py", "serve.py"):
                self.copy_file(name, str(scripts / name))

    def get_source_files(self):  # for a source distribution
        return [*super().get_source_files(), "train.py", "serve.py"]


setup(cmdclass={"build_py": BuildWithScripts})
