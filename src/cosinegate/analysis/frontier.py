"""Pareto frontier and hypervolume of points (cost, accuracy): less cost is better, more accuracy is better."""

Point = tuple[float, float]


def on_frontier(points: list[Point]) -> list[bool]:
    """Whether no other point is at least as good in both and better in one. Equal points share their place."""

    def dominates(a: Point, b: Point) -> bool:
        return a != b and a[0] <= b[0] and a[1] >= b[1]

    return [not any(dominates(other, point) for other in points) for point in points]


def hypervolume(points: list[Point], reference: Point) -> float:
    """The area that the points dominate up to the reference; a point beyond it adds nothing."""
    cost, floor = reference
    area = 0.0
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):  # each point adds what rises above the last
        if x < cost and y > floor:
            area += (cost - x) * (y - floor)
            floor = y
    return area
