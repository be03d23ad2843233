"""Hook of mkdocs for links that mkdocs itself neither converts nor checks: those of notebooks, and HTML in pages."""

import html.parser
import logging
import pathlib
import re
import urllib.parse

log = logging.getLogger("mkdocs.hooks.site_links")


class Page(html.parser.HTMLParser):
    """The links of a page, and what others may link to."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.anchors = list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def on_page_content(html: str, page, **_) -> str:
    """Point a notebook's links to the pages of the site instead of their sources."""
    return re.sub(r'href="([^":]+)\.md(#[^"]*)?"', r'href="\1.html\2"', html) if page.file.src_uri.endswith(".ipynb") else html


def on_post_build(config) -> None:
    """Log each dead link within the site; with --strict the build fails."""
    site = pathlib.Path(config.site_dir).resolve()
    # The page of errors has links from the root of a server.
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            url = urllib.parse.urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = urllib.parse.unquote(url.fragment)
            if (
                not file.is_relative_to(site)
                or not file.exists()
                or (file in pages and anchor and anchor not in pages[file].anchors)
            ):
                log.warning("%s: dead link %s", path.relative_to(site), target)
