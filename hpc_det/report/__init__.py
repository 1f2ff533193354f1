"""The report of an experiment: one HTML page with everything in it.

facts       what there is to say, as plain data: trials, spans, goodput, importances, rungs, configuration
profile     of these facts, where the time of profiled trials went
page        the facts as a page: page.html.j2 with page.css and page.js inside, and the pictures
pictures    SVG of facts: curves, parallel coordinates, importances, rungs, time lines, shares of time, bands
"""
