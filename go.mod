module rblk

go 1.26.0
