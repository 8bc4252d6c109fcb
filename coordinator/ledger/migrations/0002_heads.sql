-- Older heads are asked for by their size, by anybody: not a walk over all of them.
CREATE INDEX heads_by_size ON heads (size, id);
