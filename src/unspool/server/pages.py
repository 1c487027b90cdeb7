"""The studio's page and its files, which need no key: the page asks for one where the server wants it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from unspool.server.refusals import RequestError
from unspool.studio import PAGE_HEADERS, Asset, build_single_page, find_asset


async def show_studio(request: Request) -> Response:
    """The page itself."""
    return _send(request, find_asset("index.html"))


async def send_asset(request: Request) -> Response:
    """A module or a style sheet of the page, or the page that holds all of them."""
    name = request.path_params["name"]
    if name == "kept.html":
        return Response(build_single_page(), headers=PAGE_HEADERS, media_type="text/plain")  # to be saved, not shown
    return _send(request, find_asset(name))


def _send(request: Request, asset: Asset | None) -> Response:
    if asset is None:
        raise RequestError(404, "the studio has no file of that name")
    headers = {**PAGE_HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
