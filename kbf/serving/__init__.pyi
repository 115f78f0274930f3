from kbf.serving import (
    app as app,
    openapi as openapi,
    page as page,
    server as server,
    sessions as sessions,
    steps as steps,
    values as values,
)
