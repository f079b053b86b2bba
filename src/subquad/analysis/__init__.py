"""Looking inside: the explicit attention of a whole network, and what can be measured on it."""

from subquad.analysis.explicit_attention import attention_weights, visit_attention
from subquad.analysis.findings import Findings, confusion_words, removal_shares
from subquad.analysis.frechet import frechet_difference, frechet_distance
from subquad.analysis.indistinct_queries import confused_queries
from subquad.analysis.injectivity import confused_by, tells_apart
from subquad.analysis.maps import Diagonality, diagonality, drift, map_similarity, symmetry
from subquad.analysis.measures import ALL_MEASURES, Measure
from subquad.analysis.network_measures import MeasureRow, measure_network
from subquad.analysis.noise_errors import noise_errors
from subquad.analysis.paired_differences import Difference, mean_interval, paired_difference, relative_rise
from subquad.analysis.probes import LayerAttention
from subquad.analysis.query_maps import QueryMaps, query_maps
from subquad.analysis.removal import Removal, check_removal, removed_pairs, removing
from subquad.analysis.rows import attention_distance, entropy, local_mass, negative_mass, uniform_weights
from subquad.analysis.soft_kernels import (
    Convergence,
    best_error,
    half_correlation,
    newton_convergence,
    newton_filter,
    nystrom_error,
)
from subquad.analysis.spectra import Ranks, centred, ranks, token_similarity
from subquad.analysis.study import Study
from subquad.analysis.survey import USUAL_REMOVALS, Counts, NoQueriesError, count_confusions, count_hits, survey
from subquad.ops.soft_formula import usual_alpha

__all__ = [
    "ALL_MEASURES",
    "USUAL_REMOVALS",
    "Convergence",
    "Counts",
    "Diagonality",
    "Difference",
    "Findings",
    "LayerAttention",
    "Measure",
    "MeasureRow",
    "NoQueriesError",
    "QueryMaps",
    "Ranks",
    "Removal",
    "Study",
    "attention_distance",
    "attention_weights",
    "best_error",
    "centred",
    "check_removal",
    "confused_by",
    "confused_queries",
    "confusion_words",
    "count_confusions",
    "count_hits",
    "diagonality",
    "drift",
    "entropy",
    "frechet_difference",
    "frechet_distance",
    "half_correlation",
    "local_mass",
    "map_similarity",
    "mean_interval",
    "measure_network",
    "negative_mass",
    "newton_convergence",
    "newton_filter",
    "noise_errors",
    "nystrom_error",
    "paired_difference",
    "query_maps",
    "ranks",
    "relative_rise",
    "removal_shares",
    "removed_pairs",
    "removing",
    "survey",
    "symmetry",
    "tells_apart",
    "token_similarity",
    "uniform_weights",
    "usual_alpha",
    "visit_attention",
]
