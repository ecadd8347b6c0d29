"""The dashboards' one source: typed Python that ``make dashboards`` turns into the JSON files beside it."""
