// SPDX-License-Identifier: Apache-2.0

// Package fuse shows volumes and datasets as files through the kernel's FUSE.
// It sees cache.Volume and dataset.Manifest, and holds no data of its own.
//
// # Trees
//
// What a mount shows is a forest of trees: one for each generation of a
// dataset, one for each volume (a directory with one file), one for the list of
// exports of a mount of them all. The kernel's NodeID, which is also the inode
// number, is the tree's number in its mount and the inode's index in the tree.
// So there is nothing to keep per inode, and nothing per open file. NodeID 1,
// the mount's top directory, stands for the top of whichever tree is current.
//
// The inodes of a tree never change their identity, and those of a dataset
// never change at all: the kernel keeps their names, attributes and pages for as
// long as it likes. A new generation is a new tree; the kernel is told to forget
// the names that led to the old one, whose open files stay what they were. A
// tree ends when nothing leads to it any more and the kernel has forgotten its
// inodes: one counter of lookups minus forgets per tree tells.
//
// # One read
//
// A worker reads a request from /dev/fuse, finds the tree by number, asks the
// cache for a view of the bytes, writes header and view to /dev/fuse with one
// writev, and releases the view. On that way nothing is copied in this process,
// no goroutine is woken and no lock of this package is taken. A worker that
// takes the last idle one's place starts another, so that a request which
// blocks holds nobody up, and FUSE_INTERRUPT always finds a reader: it cancels
// the context of the call.
//
// # The descriptor
//
// go-fuse's Server cannot take over a live /dev/fuse descriptor, since it waits
// for the INIT request that the kernel sends once. This package runs its own
// loop over the descriptor with go-fuse's ProtocolServer behind it, and keeps
// the INIT: a new server can adopt the descriptor from an old one (adoptServer)
// after that has answered all that it had read (server.stop).
//
// A reader that is blocked in read(2) leaves only with a message or with the end
// of the connection. So whoever ends a server makes the kernel send messages,
// by statfs(2) on the mount; that also works for a user without privileges, and
// for a mount that is no longer in the tree.
package fuse
