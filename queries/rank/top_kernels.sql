-- gives: One of the kernels on which a rank spends most time, by name.
-- needs: kernel_place
-- parameter: top BIGINT = 20 | Names per rank.
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: place BIGINT | | 1 for the name with most time on its rank; ties by name. | never
-- column: name VARCHAR | | Name as recorded. | not recorded
-- column: kernel_class VARCHAR | | Class of the kernel. | never
-- column: kernels BIGINT | kernels | How many. | never
-- column: dur_ns BIGINT | ns | Sum of their durations. | no duration was recorded
-- column: longest_ns BIGINT | ns | The longest one. | no duration was recorded
-- column: share DOUBLE | 1 | dur_ns over that of all activities of the rank. | no duration was recorded
WITH named AS (
  SELECT rank, name, kernel_class, count(*) AS kernels, sum(dur_ns)::BIGINT AS dur_ns, max(dur_ns) AS longest_ns
  FROM kernel_place GROUP BY ALL
),
ranked AS (
  SELECT *, row_number() OVER (PARTITION BY rank ORDER BY dur_ns DESC NULLS LAST, name, kernel_class) AS place,
         dur_ns / sum(dur_ns) OVER (PARTITION BY rank) AS share
  FROM named
)
SELECT rank, place, name, kernel_class, kernels, dur_ns, longest_ns, share
FROM ranked WHERE place <= $top
ORDER BY rank, place
