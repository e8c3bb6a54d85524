"""Names of operators that a page must not take for a script, an event or mathematics."""

HOSTILE = (
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "$\\frac{1}$ 'quoted' & \"double\"",
)
