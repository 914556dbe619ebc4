"""Sphinx's settings. The source folder is the repository, so that links between README, docs/ and deploy/ hold there as here."""

import posttrain_service

project = "posttrain"
author = "the posttrain developers"
copyright = "the posttrain developers, Apache-2.0"
version = release = posttrain_service.__version__

root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**", "deploy/**"]
exclude_patterns = ["docs/conf.py"]
extensions = ["myst_parser", "sphinxcontrib.mermaid", "sphinx_copybutton"]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "dollarmath"]
myst_fence_as_directive = ["mermaid"]

html_theme = "furo"
html_title = f"posttrain {release}"
html_show_sphinx = False
html_extra_path = ["../openapi.yaml"]  # relative to this file
copybutton_prompt_text = "$ "
