"""The rules that every member of a run must agree on, as pure functions and state machines.

Nothing here opens a socket or a file, reads a clock, draws a random number or starts a process: `peer`, `coordinator`
and `cairn` do that. They depend on this package, never the reverse. Read its modules in this order:

    ids, errors, identity, envelope      digests and keys; Ed25519 signatures over exact bytes
    merkle                               blobs, their chunks and digests
    version                              which protocol a run and a Cairn speak
    strict_json                          the one reader of JSON that strangers wrote
    spec (with data_address)             the run spec, all that peers must agree on; `invite` leads to it
    layout, state                        the parameters in canonical order; a state as a file, and its digest
    messages                             what members tell each other, as dataclasses
    wire, checks, message_codec          the same as bytes: signed, verified, bounded
    directives, directive_codec          the owner's directives, and those in force on a branch
    coordinator_address, compact_record  the address that members pass on; a record as header ids
    assignment                           data windows of a peer
    codec, blob_sizes                    pseudo-gradients as bytes, and how many
    outer                                the outer step: a state and updates give the next state, bit for bit
    reduce_plan, reduce, untransmitted   the mean made by committees, in shards; values that they leave out
    update_weights, record_node, stake   the windows that count, one record in the tree, and who decides
    rebase_rule, proof_of_work           which windows a header may name; the cost of a key
    audits, audit_windows                the checks that are due, by whom, and on which windows
    report_rule, carried_reports         which reports convict, and which of them a record may carry
    audit_penalties, audit_findings      what a decision costs, and its reasons in a sentence
    chain                                the tree of certificates, its head, and what is finalized
    model, adapter, quantised            the model that a spec describes, its adapter and frozen base
    marked_tokens, packed_sequences      what a model reads of windows; `training_memory`: what training takes
    rounds                               the round machine: from events to actions
    ledger                               credits, a fold over the chain, and their audit
    bounded, token_bucket, quiet_imports helpers; `units`, `plain_text`, `extras`: words for people
"""
