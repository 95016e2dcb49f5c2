-- gives: Rows that one rank sends to and receives from one other rank (or itself) in one all-to-all of known splits.
-- needs: comm, process_group
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: call_id BIGINT | | Number of the call on its rank. | never
-- column: step BIGINT | | Step it was issued in. | outside every step
-- column: phase VARCHAR | | forward, backward, recompute, optimizer, other. | not known
-- column: microbatch INTEGER | | Micro-batch. | not known
-- column: layer INTEGER | | Layer, from 0, as a hook recorded it. | not recorded
-- column: turn BIGINT | | Place among the rank's all-to-alls of its group, step and phase, from 0: of a layer's calls as many
--   follow each other as its dispatcher makes. | never
-- column: role VARCHAR | | Role of the group. | not known
-- column: peer_index BIGINT | | Index of the other rank in the group, from 0. | never
-- column: peer_rank INTEGER | | Its global rank. | the group's ranks are not known
-- column: sent_rows BIGINT | rows | Rows this rank sends to it. | only the other list was recorded
-- column: received_rows BIGINT | rows | Rows this rank receives from it. | only the other list was recorded
WITH members AS (
  SELECT rank, group_id, any_value(ranks) AS ranks FROM process_group GROUP BY ALL
),
exchanges AS (
  SELECT c.rank, c.call_id, c.step, c.phase, c.microbatch, c.recorded_layer AS layer, c.role, c.in_splits, c.out_splits, m.ranks,
         row_number() OVER (PARTITION BY c.rank, c.group_id, c.step, c.phase ORDER BY c.call_id) - 1 AS turn
  FROM comm c
  LEFT JOIN members m ON m.rank IS NOT DISTINCT FROM c.rank AND m.group_id = c.group_id
  WHERE c.op = 'all_to_all'
),
spread AS (
  SELECT *, unnest(range(coalesce(len(in_splits), len(out_splits)))) AS place
  FROM exchanges WHERE in_splits IS NOT NULL OR out_splits IS NOT NULL
)
SELECT rank, call_id, step, phase, microbatch, layer, turn, role, place AS peer_index,
       list_extract(ranks, place + 1) AS peer_rank, list_extract(in_splits, place + 1) AS sent_rows,
       list_extract(out_splits, place + 1) AS received_rows
FROM spread
ORDER BY rank, call_id, peer_index
