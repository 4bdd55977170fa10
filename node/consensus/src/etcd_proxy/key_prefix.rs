//! Rewrites messages: adds the prefix to keys in requests, and strips it in responses.
//!
//! Pure functions: no calls are made here.

use std::sync::Arc;

use tonic::Status;

use super::super::client::successor;
use super::leases;
use super::messages::Call;
use super::wire::request_op::Request as Asked;
use super::wire::response_op::Response as Answered;
use super::wire::watch_request::RequestUnion;
use super::wire::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, KeyValue, PutRequest, PutResponse,
    RangeRequest, RangeResponse, RequestOp, ResponseOp, TxnRequest, TxnResponse, WatchRequest,
    WatchResponse,
};

/// Maximum nesting of transactions; etcd's callers do not nest them.
const DEEPEST_TXN: usize = 4;

/// etcd's own message, which its clients recognize.
pub(super) const EMPTY_KEY: &str = "etcdserver: key is not provided";

/// One user's prefix.
#[derive(Clone)]
pub(super) struct KeyPrefix {
    prefix: Arc<[u8]>,
    /// The first key after the prefix.
    end: Arc<[u8]>,
}

impl KeyPrefix {
    pub(super) fn new(prefix: &[u8]) -> Self {
        Self {
            prefix: prefix.into(),
            end: successor(prefix).into(),
        }
    }

    /// Adds the prefix to a key.
    pub(super) fn up(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if key.is_empty() {
            return Err(Status::invalid_argument(EMPTY_KEY));
        }
        key.splice(..0, self.prefix.iter().copied());
        Ok(())
    }

    /// Adds the prefix to the end of a range. Empty means a single key, and one zero byte the end
    /// of the store.
    pub(super) fn end_up(&self, end: &mut Vec<u8>) {
        match &end[..] {
            [] => {}
            [0] => *end = self.end.to_vec(),
            _ => drop(end.splice(..0, self.prefix.iter().copied())),
        }
    }

    /// Strips the prefix of a key.
    pub(super) fn down(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if !key.starts_with(&self.prefix) {
            return Err(Status::internal(
                "etcd's response contains a key outside the namespace",
            ));
        }
        key.drain(..self.prefix.len());
        Ok(())
    }

    pub(super) fn all_down<'a>(
        &self,
        records: impl IntoIterator<Item = &'a mut KeyValue>,
    ) -> Result<(), Status> {
        let mut records = records.into_iter();
        records.try_for_each(|record| self.down(&mut record.key))
    }

    pub(super) fn range_up(&self, request: &mut RangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    pub(super) fn put_up(&self, request: &mut PutRequest) -> Result<(), Status> {
        if request.lease != 0 && !leases::is_ours(request.lease) {
            return Err(Status::not_found(leases::NO_SUCH_LEASE));
        }
        self.up(&mut request.key)
    }

    pub(super) fn delete_up(&self, request: &mut DeleteRangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    pub(super) fn compare_up(&self, compare: &mut Compare) -> Result<(), Status> {
        self.up(&mut compare.key)?;
        self.end_up(&mut compare.range_end);
        Ok(())
    }

    pub(super) fn txn_up(&self, request: &mut TxnRequest, depth: usize) -> Result<(), Status> {
        if depth > DEEPEST_TXN {
            return Err(Status::invalid_argument(
                "transactions are nested too deeply",
            ));
        }
        for compare in &mut request.compare {
            self.compare_up(compare)?;
        }
        for operation in request.success.iter_mut().chain(&mut request.failure) {
            self.operation_up(operation, depth)?;
        }
        Ok(())
    }

    fn operation_up(&self, operation: &mut RequestOp, depth: usize) -> Result<(), Status> {
        match &mut operation.request {
            Some(Asked::RequestRange(range)) => self.range_up(range),
            Some(Asked::RequestPut(put)) => self.put_up(put),
            Some(Asked::RequestDeleteRange(delete)) => self.delete_up(delete),
            Some(Asked::RequestTxn(txn)) => self.txn_up(txn, depth + 1),
            // An unknown operation would bypass the rewriting above.
            None => Err(Status::invalid_argument(
                "unknown operation in a transaction",
            )),
        }
    }

    pub(super) fn txn_down(&self, answer: &mut TxnResponse) -> Result<(), Status> {
        let mut answers = answer.responses.iter_mut();
        answers.try_for_each(|answer| self.operation_down(answer))
    }

    fn operation_down(&self, answer: &mut ResponseOp) -> Result<(), Status> {
        match &mut answer.response {
            Some(Answered::ResponseRange(range)) => self.all_down(&mut range.kvs),
            Some(Answered::ResponsePut(put)) => self.all_down(&mut put.prev_kv),
            Some(Answered::ResponseDeleteRange(delete)) => self.all_down(&mut delete.prev_kvs),
            Some(Answered::ResponseTxn(txn)) => self.txn_down(txn),
            None => Ok(()),
        }
    }

    /// A watch without a key starts at the first key.
    pub(super) fn watch_up(&self, request: &mut WatchRequest) {
        if let Some(RequestUnion::CreateRequest(create)) = &mut request.request_union {
            create.key.splice(..0, self.prefix.iter().copied());
            self.end_up(&mut create.range_end);
        }
    }

    pub(super) fn watch_down(&self, answer: &mut WatchResponse) -> Result<(), Status> {
        for event in &mut answer.events {
            self.all_down(&mut event.kv)?;
            self.all_down(&mut event.prev_kv)?;
        }
        Ok(())
    }
}

/// A request about keys, which is forwarded.
pub(super) trait HasKeys: Call {
    /// Rewrites the keys of the request for the store.
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status>;

    /// Rewrites the keys of the response for the program.
    fn down(answer: &mut Self::Answer, prefix: &KeyPrefix) -> Result<(), Status>;

    /// Whether it may write keys, and not only delete them.
    fn may_put(&self) -> bool {
        false
    }
}

impl Call for RangeRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Range";
    type Answer = RangeResponse;
}

impl HasKeys for RangeRequest {
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.range_up(self)
    }

    fn down(answer: &mut RangeResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.kvs)
    }
}

impl Call for PutRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Put";
    type Answer = PutResponse;
}

impl HasKeys for PutRequest {
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.put_up(self)
    }

    fn down(answer: &mut PutResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.prev_kv)
    }

    fn may_put(&self) -> bool {
        true
    }
}

impl Call for DeleteRangeRequest {
    const PATH: &'static str = "/etcdserverpb.KV/DeleteRange";
    type Answer = DeleteRangeResponse;
}

impl HasKeys for DeleteRangeRequest {
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.delete_up(self)
    }

    fn down(answer: &mut DeleteRangeResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.prev_kvs)
    }
}

impl Call for TxnRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Txn";
    type Answer = TxnResponse;
}

impl HasKeys for TxnRequest {
    // A lease in a comparison is not rewritten: it only reveals whether the user's own key is
    // attached to it.
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.txn_up(self, 0)
    }

    fn down(answer: &mut TxnResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.txn_down(answer)
    }

    /// Depends on the result of its comparisons, so both branches count.
    fn may_put(&self) -> bool {
        let mut operations = self.success.iter().chain(&self.failure);
        operations.any(|operation| match &operation.request {
            Some(Asked::RequestPut(_)) => true,
            Some(Asked::RequestTxn(inner)) => inner.may_put(),
            _ => false,
        })
    }
}
