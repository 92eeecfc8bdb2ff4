"""The Pareto frontier and the hypervolume of points (cost, accuracy): less cost and more accuracy are better."""

import math

Point = tuple[float, float]


def on_frontier(points: list[Point]) -> list[bool]:
    """Returns for each point whether no other is at least as good in both and better in one. Equal points agree."""
    kept: set[Point] = set()
    best = -math.inf
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):  # at equal cost the best comes first
        if point[1] > best:
            kept.add(point)
            best = point[1]
    return [point in kept for point in points]


def hypervolume(points: list[Point], reference: Point) -> float:
    """Returns the area that the points dominate up to the reference; a point beyond it adds nothing."""
    cost, floor = reference
    area = 0.0
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):  # each point adds what rises above the last
        if x < cost and y > floor:
            area += (cost - x) * (y - floor)
            floor = y
    return area
